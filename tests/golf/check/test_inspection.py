"""What code reaches, read and never run: each way onto the network is named with its line, and what is harmless is left alone."""

import base64
import lzma
import zlib
from pathlib import Path

import brotli
import pytest

from bitsperbyte.golf.check.inspection import Inspection, inspect_code


def inspect(tmp_path: Path, source: str) -> Inspection:
    script = tmp_path / "train_gpt.py"
    script.write_text(source, encoding="utf-8")
    return inspect_code(script, source)


REACHING = {
    "import socket": "socket", "import urllib.request": "urllib.request", "from urllib.request import urlopen": "urlopen",
    "import requests as r": "requests", "from http import client": "http.client", "from huggingface_hub import hf_hub_download": "hf_hub_download",
    "__import__('soc' + 'ket')": "socket", "import importlib\nimportlib.import_module('requests')": "requests",
    "import os\nos.system('curl http://example.org')": "curl", "import subprocess\nsubprocess.run(['wget', 'x'])": "wget",
    "from subprocess import check_output as c\nc('bash -c \"curl x\"', shell=True)": "curl",
    "import subprocess as s\nimport sys\ns.run([sys.executable, '-m', 'pip', 'install', 'x'])": "pip",
    "import subprocess\ncommand = ['git', 'clone', 'x']\nsubprocess.Popen(command)": "git",
    "import torch\ntorch.hub.load('a', 'b')": "torch.hub.load", "from datasets import load_dataset": "load_dataset",
    "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2')": "from_pretrained",
    "try:\n    import wandb\nexcept ImportError:\n    wandb = None": "wandb",
}


@pytest.mark.parametrize("source", REACHING)
def test_ways_onto_the_network_are_named_with_their_line(source: str, tmp_path: Path) -> None:
    found = inspect(tmp_path, f"\n\n{source}\n")
    assert found.network and all(REACHING[source] in reach or "line" in reach for reach in found.network)
    assert any(REACHING[source] in reach for reach in found.network)
    lines = {number for number, text in enumerate(f"\n\n{source}\n".splitlines(), 1) if text}
    assert all(int(reach.split("line ")[1].split()[0]) in lines for reach in found.network)


HARMLESS = [
    "import torch\nmodel = torch.compile(torch.nn.Linear(2, 2))\nmodel.eval()\nimport re\nre.compile('x')",
    "import subprocess\nprint(subprocess.run(['nvidia-smi'], capture_output=True, text=True).stdout)",
    "import torch.distributed as dist\ndist.init_process_group(backend='nccl')",
    "from urllib.parse import quote\nfrom http import HTTPStatus", "import os\nos.environ.get('HTTP_PROXY')\nos.getpid()",
    "from transformers import AutoModel\nAutoModel.from_pretrained('folder', local_files_only=True)",
    "text = 'import socket; curl http://example.org'", "class Net:\n    def connect(self): pass\nNet().connect()",
    "import ctypes\nctypes.c_int(3)", "import base64\npad = base64.b64decode(b'aGVsbG8=')",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_harmless_code_raises_no_alarm(source: str, tmp_path: Path) -> None:
    found = inspect(tmp_path, source)
    assert (found.network, found.unseen, found.broken) == ([], [], [])


def wrappers(inner: str) -> dict[str, str]:
    raw = inner.encode()
    b85 = base64.b85encode(lzma.compress(raw)).decode()
    bare = base64.b85encode(lzma.compress(raw, format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])).decode()
    return {
        "lzma": f"import lzma as L,base64 as B\nexec(L.decompress(B.b85decode({b85!r})))",
        "named": f"import lzma, base64\nSOURCE = lzma.decompress(base64.b85decode({b85!r})).decode()\nexec(compile(SOURCE, __file__, 'exec'))",
        "raw": f"import lzma as L,base64 as B\nexec(L.decompress(B.b85decode({bare!r}),format=L.FORMAT_RAW,filters=[{{'id':L.FILTER_LZMA2}}]))",
        "zlib": f"exec(__import__('zlib').decompress({zlib.compress(raw)!r}))",
        "brotli": f"import brotli\nexec(brotli.decompress({brotli.compress(raw)!r}).decode('utf-8'))",
        "file": f"import zlib, runpy\nopen('x.py', 'wb').write(zlib.decompress({zlib.compress(raw)!r}))\nrunpy.run_path('x.py')",
        "twice": f"import zlib\nexec(zlib.decompress({zlib.compress(f'exec({inner!r})'.encode())!r}))",
    }


@pytest.mark.parametrize("kind", wrappers(""))
def test_code_inside_wrappers_is_inspected(kind: str, tmp_path: Path) -> None:
    found = inspect(tmp_path, wrappers("import math\nimport socket\n")[kind])
    assert len(found.network) == 1 and "decoded at line" in found.network[0] and "line 2 imports socket" in found.network[0]
    assert found.mentions("import socket") and found.unseen == []
    assert inspect(tmp_path, wrappers("import math\nprint(math.pi)\n")[kind]).network == []


@pytest.mark.parametrize("source", [
    "import sys\nexec(open(sys.argv[1]).read())", "eval(input())", "import importlib, os\nimportlib.import_module(os.environ['M'])",
    "import subprocess, os\nsubprocess.run(os.environ['C'].split())", "import zlib\nexec(zlib.decompress(b'damaged'))",
    "import ctypes\nctypes.CDLL('libc.so.6')", "from torch.utils.cpp_extension import load_inline\nload_inline('x', 'int f();')",
])
def test_what_cannot_be_seen_is_said(source: str, tmp_path: Path) -> None:
    found = inspect(tmp_path, source)
    assert len(found.unseen) == 1 and found.network == []


def test_files_of_the_folder_that_are_imported_are_code_too(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import socket\n", encoding="utf-8")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import deep\n", encoding="utf-8")
    (tmp_path / "parts" / "deep.py").write_text("import requests\n", encoding="utf-8")
    (tmp_path / "unused.py").write_text("import httpx\n", encoding="utf-8")
    found = inspect(tmp_path, "from helper import f\nimport parts\n")
    assert [path.relative_to(tmp_path).as_posix() for path in found.local_files] == ["helper.py", "parts/__init__.py", "parts/deep.py"]
    assert sorted(found.network) == ["helper.py line 1 imports socket", "parts/deep.py line 1 imports requests"]
    assert [used.package for used in found.imports if used.is_local] == ["deep"]


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("import socket\n", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "helper.py").symlink_to(tmp_path / "outside.py")
    assert inspect(tmp_path / "folder", "import helper\n").local_files == []


@pytest.mark.parametrize("source", ["def f(:\n", "x = '\0'", "(" * 300 + ")" * 300, "if x:\n\ty\n        z\n"])
def test_what_does_not_parse_is_broken_with_its_line(source: str, tmp_path: Path) -> None:
    assert len(inspect(tmp_path, source).broken) == 1


def test_optional_imports_are_told_apart(tmp_path: Path) -> None:
    found = inspect(tmp_path, "import a\ntry:\n    import b\nexcept ImportError:\n    b = None\ntry:\n    import c\nexcept KeyError:\n    pass\n")
    assert {used.package: used.optional for used in found.imports} == {"a": False, "b": True, "c": False}

"""Continue a prompt with a golf model."""

import torch

from bitsperbyte.golf.model import GolfModel
from bitsperbyte.text.tokenizers import Tokenizer


def sample(model: GolfModel, tokenizer: Tokenizer, prompt: str, *, num_tokens: int = 200, temperature: float = 0.8, top_k: int = 50,
           context: int = 1024, seed: int = 0) -> str:
    """The prompt's continuation, `num_tokens` long or up to the next document. Temperature 0 is greedy. The same seed gives the same
    text on the same kind of machine."""
    if not temperature >= 0 or top_k < 1:
        raise ValueError(f"temperature {temperature} must be 0 or more and top_k {top_k} at least 1")
    device = model.tok_emb.weight.device
    generator = torch.Generator(device="cpu").manual_seed(seed)
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    start = len(ids)
    with torch.no_grad():
        for _ in range(num_tokens):
            window = torch.tensor([ids[-context:]], device=device)
            logits = model.logits(model.hidden(window)[0, -1:])[0].cpu()
            if temperature == 0:
                chosen = int(logits.argmax())
            else:
                top = logits.topk(min(top_k, len(logits)))
                p = ((top.values - top.values[0]) / temperature).softmax(-1)  # no overflow at tiny temperatures
                chosen = int(top.indices[torch.multinomial(p, 1, generator=generator)])
            if chosen == tokenizer.bos_id:
                break
            ids.append(chosen)
    # not decode(ids[start:]): at the start of a text the decoder drops a space
    return tokenizer.decode(ids[1:])[len(tokenizer.decode(ids[1:start])) :]

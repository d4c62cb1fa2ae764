"""Memory of the output head's loss and backward over that of its logits, and the largest error of its gradients.

A program of its own: `python head_memory.py` prints both. The growth of resident memory from the inputs alone to the
peak of forward and backward is counted, with nothing else in the process.
"""

from pathlib import Path

import torch

from hybrid_grpo.model.logprobs import token_logprobs

V, N, D = 75_968, 4096, 64
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(N, D, generator=generator).requires_grad_()
weight = (0.3 * torch.randn(V, D, generator=generator)).requires_grad_()
target = torch.randint(V, (N,), generator=generator)
of_logp, of_entropy = torch.randn(2, N, generator=generator) / N


def resident(field):
    # Not getrusage: its maximum is inherited over exec from the process that started this one.
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


# Code and thread buffers are paged in by first use.
for values in token_logprobs(hidden[:8], weight[:200], None, target[:8] % 200):
    torch.autograd.grad(values.sum(), [hidden, weight], retain_graph=True)
before = resident("VmRSS")
logp, entropy = token_logprobs(hidden, weight, None, target)
(logp @ of_logp + entropy @ of_entropy).backward()
extra = resident("VmHWM") - before

# Against the plain ones for some of the tokens: of all, they take six times as long.
M = 64
hidden.grad = weight.grad = None
logp, entropy = token_logprobs(hidden[:M], weight, None, target[:M])
(logp @ of_logp[:M] + entropy @ of_entropy[:M]).backward()
mine = hidden.grad, weight.grad
hidden.grad = weight.grad = None
logp_NV = (hidden[:M] @ weight.T).log_softmax(-1)
plain_entropy = -(logp_NV.exp() * logp_NV).sum(-1)
plain_logp = logp_NV.gather(1, target[:M, None])[:, 0]
(plain_logp @ of_logp[:M] + plain_entropy @ of_entropy[:M]).backward()
torch.testing.assert_close(logp, plain_logp, rtol=1e-5, atol=0)
torch.testing.assert_close(entropy, plain_entropy, rtol=1e-5, atol=0)
worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, (hidden.grad, weight.grad), strict=True))
print(extra / (4 * V * N), worst)

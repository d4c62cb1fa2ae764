"""A language model as judge: completions earn what it says they are worth, compared with the others of their prompt.

python examples/judged.py                                          a stand-in judge, which likes vowels
python examples/judged.py http://127.0.0.1:8000/v1 NAME_OF_MODEL   any server of chat completions, such as vLLM's
"""

import json
import random
import re
import string
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import hybrid_grpo as hg

MODEL = "runs/letters-task/model"


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # a judge is asked about many groups at once


class StandIn(BaseHTTPRequestHandler):
    """Answers as a judge would: with reasons, and a score from 0 to 10 for each answer."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = re.findall(r"<answer \d+>\n(.*?)\n</answer", body["messages"][-1]["content"], re.DOTALL)
        scores = [min(10, sum(letter in "aeiou" for letter in answer)) for answer in answers]
        content = f"I counted the vowels.\nScores: {', '.join(map(str, scores))}"
        answer = {"choices": [{"message": {"content": content}}], "usage": {"total_tokens": len(str(body)) // 4}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


def main(url: str = "", model: str = "stand-in") -> None:
    if not url:
        server = Server(("127.0.0.1", 0), StandIn)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
    draw = random.Random(0)
    judge = {"url": url, "model": model, "rubric": "The more vowels, the better.", "relative": True}
    run = hg.train(
        model=MODEL,
        data=[{"prompt": "".join(draw.sample(string.ascii_lowercase, 4)) + "="} for _ in range(64)],
        rewards=[{"function": "judge", "kwargs": judge}],
        run={"name": "judged", "steps": 10},
        policy={"dtype": "float32", "lr": 3e-3},
        rollout={"prompts_per_step": 16, "max_completion_tokens": 8},
        log={"wandb": "disabled"},
    )
    columns = ["step", "reward/mean", "reward/judge/tokens", "reward/judge/failed_frac"]
    print(run.metrics[columns].to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])

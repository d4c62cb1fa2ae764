"""`serve-reward`: serves reward functions over HTTP to this machine or others. It needs no policy and no ranks."""

import ssl
import sys
from pathlib import Path

from hybrid_grpo.commands.configs import ServeRewardConfig
from hybrid_grpo.config.checks import check_rewards
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.rewards.remote.options import ServeOptionsConfig, bearer_token, is_loopback

PATH = "/get_reward"
"""The path to which OpenRLHF sends its requests."""


def run(arguments: list[str]) -> None:
    config = parse(ServeRewardConfig, arguments, "serve-reward").config
    _check_place(config)
    serve = config.serve
    tls = _tls(serve)

    from hybrid_grpo.rewards.loader import load_rewards
    from hybrid_grpo.rewards.remote import server
    from hybrid_grpo.rewards.remote.service import RewardService
    from hybrid_grpo.rewards.scorer import Rewards

    loaded = load_rewards(config.rewards, config.scoring)
    needs_ids = [reward.name for reward in loaded if "completion_ids" in reward.interface.required]
    rewards = Rewards(loaded, config.scoring)
    rewards.load_models()
    token = bearer_token("serve.token_env", serve.token_env) if serve.token_env else None
    app = server.application(PATH, RewardService(rewards.score, serve, needs_ids).answer, serve, token)
    try:
        listener = server.listen(serve.host, serve.port)
    except OSError as error:
        where = f"serve.host {serve.host}, serve.port {serve.port}"
        raise UserError(f"cannot listen on {where}: {error.strerror or error}") from None
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    url = f"http{'s' if tls else ''}://{host}:{listener.getsockname()[1]}{PATH}"

    def announce() -> None:
        print(f"serving {', '.join(reward.name for reward in loaded)} at {url}", file=sys.stderr, flush=True)
        if token and not tls and not is_loopback(serve.host):
            print("without serve.certificate the token can be intercepted", file=sys.stderr, flush=True)

    server.serve(app, listener, serve, tls, announce)


def _check_place(config: ServeRewardConfig) -> None:
    """Refuse invalid rewards, a missing token or file, and a service that other machines can reach without a token."""
    check_rewards(config.rewards)
    serve = config.serve
    refuse(
        serve.token_env is None and not is_loopback(serve.host),
        f"serve.host {serve.host} can be reached from outside: name the variable with a token in serve.token_env",
    )
    if serve.token_env is not None:
        try:
            bearer_token("serve.token_env", serve.token_env)
        except ValueError as error:
            raise UserError(str(error)) from None
    for name in ("certificate", "key"):
        path = getattr(serve, name)
        refuse(path is not None and not Path(path).is_file(), f"serve.{name} {path}: there is no such file")


def _tls(serve: ServeOptionsConfig) -> ssl.SSLContext | None:
    if serve.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password given here, Python would ask for one at the terminal.
        context.load_cert_chain(serve.certificate, serve.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise UserError(
            f"serve.certificate {serve.certificate} is not a certificate with its private key in PEM, without a"
            f" password: {error}"
        ) from None
    return context

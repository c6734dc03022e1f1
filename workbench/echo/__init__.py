"""Echo: the token-echo arm, the baseline that token capture is compared with.

    agent ─▶ EchoClient ─▶ gateway ─▶ engine        every turn's prompt is rendered afresh from text
           ◀─ ids and log-probs ride in the response, and are taken out here ─┘
    EchoedCalls ─▶ assemble_echo ─▶ N training rows

It is how rollouts were trained before capture: each answer brings its ids along, the turns are put together by their
lengths, and where a template or a tokenizer renders an earlier turn differently, the row has tokens in a context that
nobody sampled them in. How often that happened is counted (`echo_wrong_rows`), never mended: it is a baseline.
Nothing here imports `workbench.capture`.
"""

from workbench.echo.calls import EchoedCall, chain_of
from workbench.echo.rows import assemble_echo, concatenate

__all__ = ["EchoedCall", "assemble_echo", "chain_of", "concatenate"]

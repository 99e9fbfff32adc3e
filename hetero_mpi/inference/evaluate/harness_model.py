"""The command line of lm-evaluation-harness with an additional model type that uses a server with this program's tokenisation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI

from hetero_mpi.data.tokenizer import beginning, document_token_ids, encoded, own_tokens_only


@register_model("hetero_mpi")
class HarnessModel(LocalCompletionsAPI):
    """A client of the ``/v1/completions`` endpoint of ``serve`` that sends token ids.

    Strings get the tokens that the tokenizer prepends, exactly once. Conversations are sent as the chat template prints them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, add_bos_token=True)
        self._engine = own_tokens_only(self.tokenizer)
        self._templated = False

    def apply_chat_template(self, *conversation: Any, **options: Any) -> Any:
        self._templated = True
        return super().apply_chat_template(*conversation, **options)

    def tok_encode(self, string: str | Sequence[str], *_: Any, add_special_tokens: bool = True, **__: Any) -> Any:
        """Tokenise strings. ``add_special_tokens``: false if lm-eval itself prepends a token."""
        encode = document_token_ids if add_special_tokens and not self._templated else encoded
        ids = encode(self._engine, [string] if isinstance(string, str) else list(string))
        return ids[0] if isinstance(string, str) else ids

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any) -> Any:
        """Compute log-probabilities. The tokens that the tokenizer prepends replace lm-eval's token for an empty context."""
        prefix, begin = [self.prefix_token_id], beginning(self._engine)
        adjusted = [
            (key, begin, ids[len(begin) :] if ids[: len(begin)] == begin else ids)
            if begin and context == prefix
            else (key, context, ids)
            for key, context, ids in requests
        ]
        return super()._loglikelihood_tokens(adjusted, **options)


if __name__ == "__main__":
    try:
        cli_evaluate()
    except ConnectionError as error:  # of the package datasets
        tasks = sys.argv[sys.argv.index("--tasks") + 1]
        sys.exit(
            f"{error}; the tasks' data are not in this machine's cache either: unset HF_HUB_OFFLINE, or, on a machine with a "
            "network and the same cache (HF_HOME), such as a login node:\n"
            f"  HF_HUB_OFFLINE=0 {sys.executable} -m lm_eval run --model dummy --tasks {tasks} --limit 1"
        )

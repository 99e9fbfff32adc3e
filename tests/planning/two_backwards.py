"""All forwards, then all gradients of the inputs, then all gradients of the weights: an order for the tests of orders."""

from collections.abc import Iterator

from hetero_mpi.planning.types.plan import PipelinePlan

SPLITS = True


def computing(pipeline: PipelinePlan, place: int) -> Iterator[tuple[str, int]]:
    """Nobody waits for the first stage's input gradient: its backward stays whole."""
    for op in ("F", "I", "W") if place > 0 else ("F", "B"):
        yield from ((op, m) for m in range(pipeline.micro_batches))

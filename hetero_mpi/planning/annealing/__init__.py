"""Plans made better by changes that may first make them worse: ``anneal`` tries them, ``changes`` makes them, ``lines`` says what
they cost."""

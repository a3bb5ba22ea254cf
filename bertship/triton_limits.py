"""Sizes that the repository's configurations promise and the served steps hold."""

MAX_ROWS = 4096  # rows of one request, and of one execution of the embedded encoder
PLAN_MAX_BATCH = 32  # rows of one execution of a TensorRT plan
MAX_QUEUE = 1024  # requests that wait for an encoder; one more is told that the server is busy
QUEUE_TIMEOUT_S = 600  # the longest wait for an encoder, for requests that name no shorter one
CORES = "cores"  # what the embedded encoders ask of Triton's rate limiter: one execution has all of them
LONG_CHARACTERS = 20_000  # a request with more is tokenized and decoded beside the others, not before them
TURN_TOKENS = 384  # tokens a thread that one request may take of an execution before the others get their turn
FLUSH_S = 0.25  # seconds until the steps' counters reach the server's metrics

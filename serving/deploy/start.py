"""The container's entry point: tritonserver on a repository, with its control APIs closed. The standard library alone.

Environment: BERTSHIP_REPOSITORY (a folder, s3://, gs:// or as://), BERTSHIP_CONFIG (the variant of the configurations:
empty for TensorRT plans, `onnxruntime`, or `embedded` for a CPU), BERTSHIP_KEY_FILE (the key of the control APIs; a
random one that nobody knows where there is none), BERTSHIP_MAX_REQUEST_MIB, and BERTSHIP_HTTP_PORT, BERTSHIP_GRPC_PORT,
BERTSHIP_METRICS_PORT. Arguments are passed on to tritonserver, after its own.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# as `serving.control` has them for the embedded server
HEADER = "bertship-key"
RESTRICTED = "model-repository,shared-memory,trace,logging"
MAX_REQUEST_MIB = 64


def command(variables: Mapping[str, str], known: str, arguments: Sequence[str] = ()) -> list[str]:
    """tritonserver's command line; `known` is what its --help says. Raises ValueError and OSError."""
    closed = f"{RESTRICTED}:{HEADER}={_key(variables)}"
    flags = [
        "tritonserver",
        f"--model-repository={variables.get('BERTSHIP_REPOSITORY', '/models')}",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--http-port={variables.get('BERTSHIP_HTTP_PORT', '8000')}",
        f"--grpc-port={variables.get('BERTSHIP_GRPC_PORT', '8001')}",
        f"--metrics-port={variables.get('BERTSHIP_METRICS_PORT', '8002')}",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
        "--exit-timeout-secs=30",
        "--log-format=ISO8601",
    ]
    if config := variables.get("BERTSHIP_CONFIG", ""):
        flags.append(f"--model-config-name={config}")
    # newer servers alone can refuse a large HTTP request before they have read it
    if "--http-max-input-size" in known:
        mib = int(variables.get("BERTSHIP_MAX_REQUEST_MIB", MAX_REQUEST_MIB))
        flags.append(f"--http-max-input-size={mib << 20}")
    return [*flags, *arguments]


def _key(variables: Mapping[str, str]) -> str:
    path = variables.get("BERTSHIP_KEY_FILE", "")
    if not path or not Path(path).exists():
        return secrets.token_urlsafe(32)
    key = Path(path).read_text(encoding="ascii").strip()
    if len(key) < 16:
        raise ValueError(f"{path} has a key of {len(key)} characters: at least 16 are needed")
    return key


def main() -> None:
    known = subprocess.run(["tritonserver", "--help"], capture_output=True, text=True, check=False)
    try:
        flags = command(os.environ, known.stdout + known.stderr, sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    os.execvp(flags[0], flags)


if __name__ == "__main__":
    main()

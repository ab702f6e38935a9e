#!/usr/bin/env bash
# Train on this machine, on a Ray cluster that the run starts and stops itself.
#
#   launch/single_node.sh +exp=akl_7b seed=1
#   RUN_ID=my-run launch/single_node.sh +exp=akl_7b     # the same RUN_ID again resumes where it stopped
#
# PYTHON names the interpreter (default: .venv/bin/python of this checkout, else python3).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x "$ROOT/.venv/bin/python" ]]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python3; fi
fi

given() {  # given KEY ARGUMENT...: whether KEY= is among the arguments
  local key="$1" argument
  shift
  for argument in "$@"; do [[ "$argument" == "$key="* ]] && return 0; done
  return 1
}

arguments=("$@")
given cluster.address "$@" || arguments+=("cluster.address=local")
if ! given run_id "$@"; then
  RUN_ID="${RUN_ID:-$(date +%Y%m%d-%H%M%S)-$$}"
  arguments+=("run_id=$RUN_ID")
  echo "run_id=$RUN_ID (set RUN_ID=$RUN_ID to resume)"
fi

export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 HF_HUB_DISABLE_TELEMETRY=1
# An ephemeral token: nothing else on the machine can join the run's cluster, and no token file is written.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')}"
export RAY_AUTH_TOKEN

exec "$PYTHON" -m akl_dist.main "${arguments[@]}"

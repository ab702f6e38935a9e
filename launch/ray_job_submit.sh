#!/usr/bin/env bash
# Start a Ray head on this machine, submit one training job to it, wait for it, stop that head again.
#
#   launch/ray_job_submit.sh +exp=akl_7b seed=1
#   JOB_ID=my-job launch/ray_job_submit.sh +exp=akl_7b  # the same JOB_ID again resumes the run
#
# To submit to a cluster that runs already, no script is needed:
#   RAY_AUTH_MODE=token RAY_AUTH_TOKEN=... ray job submit --address http://HEAD:8265 -- python -m akl_dist.main +exp=akl_72b
#
# Jobs are taken on 127.0.0.1 only, and every port of the head wants the token made here. Only the head started here is
# stopped, by its process id.
# PYTHON names the interpreter (default: .venv/bin/python of this checkout, else python3); ray is taken from beside it.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [[ -z "${PYTHON:-}" ]]; then
  if [[ -x "$ROOT/.venv/bin/python" ]]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON="$(command -v python3)"; fi
fi
RAY="$(dirname "$PYTHON")/ray"
START_TIMEOUT_S="${START_TIMEOUT_S:-120}"

given() {  # given KEY ARGUMENT...: whether KEY= is among the arguments
  local key="$1" argument
  shift
  for argument in "$@"; do [[ "$argument" == "$key="* ]] && return 0; done
  return 1
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

unset RAY_ADDRESS  # another cluster's
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 HF_HUB_DISABLE_TELEMETRY=1
export RAY_AUTH_MODE=token  # for the head, for the submission below, and (inherited from the head) for the job
RAY_AUTH_TOKEN="$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_TOKEN

JOB_ID="${JOB_ID:-$(date +%Y%m%d-%H%M%S)-$$}"
TEMP_DIR="$(mktemp -d /tmp/akl_ray.XXXXXX)"  # short: the paths of Unix sockets have a limit of 107 characters
GCS_PORT="$(free_port)"
DASHBOARD_PORT="$(free_port)"
export RAY_API_SERVER_ADDRESS="http://127.0.0.1:$DASHBOARD_PORT"
SUBMISSION_ID="akl-$JOB_ID-$$"  # a resumed job is a new submission of the same run
HEAD_PID=""
SUBMIT_PID=""

stop_head() {
  trap - EXIT INT TERM
  if [[ -n "$HEAD_PID" ]] && kill -0 "$HEAD_PID" 2>/dev/null; then
    kill -TERM "$HEAD_PID"  # `ray start --block` ends its own child processes
    for _ in $(seq 30); do kill -0 "$HEAD_PID" 2>/dev/null || break; sleep 1; done
    kill -KILL "$HEAD_PID" 2>/dev/null || true
  fi
  rm -rf "$TEMP_DIR"
}
on_signal() {
  # The job gets SIGTERM and time to save its state; then the head goes.
  "$RAY" job stop "$SUBMISSION_ID" >/dev/null 2>&1 || true
  [[ -n "$SUBMIT_PID" ]] && wait "$SUBMIT_PID" || true
  exit 143
}
trap stop_head EXIT
trap on_signal INT TERM

# The agent that runs jobs has a fixed port by default, which another cluster on this machine may hold; then no job is ever taken.
RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-120}" "$RAY" start --head --block \
  --port="$GCS_PORT" --dashboard-host=127.0.0.1 --dashboard-port="$DASHBOARD_PORT" --dashboard-agent-listen-port=0 \
  --temp-dir="$TEMP_DIR" >"$TEMP_DIR/head.log" 2>&1 &
HEAD_PID=$!

deadline=$((SECONDS + START_TIMEOUT_S))
# The job list answers before the agent that runs jobs is there, so a job is what is tried.
until timeout "$START_TIMEOUT_S" "$RAY" job submit --no-wait -- true >"$TEMP_DIR/submit.log" 2>&1; do
  if ! kill -0 "$HEAD_PID" 2>/dev/null || ((SECONDS >= deadline)); then
    echo "the Ray head took no job within $START_TIMEOUT_S s (START_TIMEOUT_S=...); its output, and its last answer:" >&2
    cat "$TEMP_DIR/head.log" "$TEMP_DIR/submit.log" >&2
    exit 1
  fi
  sleep 1
done

arguments=("$@")
given run_id "$@" || arguments+=("run_id=$JOB_ID")
given cluster.address "$@" || arguments+=("cluster.address=auto")  # RAY_ADDRESS, which the job finds set
echo "job $SUBMISSION_ID: python -m akl_dist.main ${arguments[*]}"
"$RAY" job submit --submission-id "$SUBMISSION_ID" -- "$PYTHON" -m akl_dist.main "${arguments[@]}" &
SUBMIT_PID=$!
wait "$SUBMIT_PID"

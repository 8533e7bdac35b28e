#!/bin/sh
# Create .venv and install the pinned list of $KIND (cpu or gpu) and this project into it. Called by the Makefile.
#
# Reads KIND, PYTHON, TORCH_INDEX and pip's and uv's own settings. Nothing is resolved: every package is installed
# with --no-deps, because the pins inside some packages contradict each other (docs/decisions/0001-one-pinned-list.md).
set -eu
cd "$(dirname "$0")/.."
kind=${KIND:-cpu}
list=requirements/$kind.txt
venv_python=.venv/bin/python
say() { echo "make: $*" >&2; }
die() { say "$*"; exit 1; }

[ -f "$list" ] || die "there is no $list; KIND is cpu or gpu"
[ "$(uname -sm)" = "Linux x86_64" ] || die "only Linux on x86-64 is supported, this is $(uname -sm)"

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if [ -x $venv_python ]; then
    fits $venv_python || die ".venv/bin/python does not run or is not Python 3.11 to 3.13; run \`make clean\` and try again"
    if [ -f .venv/.kind ] && [ "$(cat .venv/.kind)" != "$kind" ]; then
        say "replacing the $(cat .venv/.kind) installation in .venv"
        rm -rf .venv
    fi
fi
if [ ! -x $venv_python ]; then
    chosen=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if fits "$candidate"; then chosen=$candidate && break; fi
    done
    [ -n "$chosen" ] || die "no Python 3.11 to 3.13 with venv and pip among: ${PYTHON:-python3.11 python3.12 python3.13 python3};" \
        "install one (Debian and Ubuntu: python3-venv, too) or name it with PYTHON=..."
    "$chosen" -m venv .venv
fi
echo "$kind" > .venv/.kind

retry() {  # downloads fail; what has arrived is cached, so another try continues
    for attempt in 1 2 3; do
        "$@" && return 0
        say "attempt $attempt of 3 failed"
        sleep $((attempt * 5))
    done
    return 1
}

# pip finds wheels where it is configured to; uv must be told of the same places.
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" UV_HTTP_RETRIES="${UV_HTTP_RETRIES:-8}"
if [ "$kind" = cpu ] && [ -z "${UV_FIND_LINKS:-}" ] && [ -n "${PIP_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=$(echo "$PIP_FIND_LINKS" | tr ' ' ',')
    export UV_FIND_LINKS
fi
if [ -z "${UV_DEFAULT_INDEX:-}" ] && [ -n "${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$PIP_INDEX_URL"; fi

pip="$venv_python -m pip --disable-pip-version-check"
# shellcheck disable=SC2086  # $pip is three words on purpose
if [ -x .venv/bin/uv ] || retry $pip install --quiet --retries 8 --timeout 180 "$(grep '^uv==' "$list")"; then
    set -- .venv/bin/uv pip install --python $venv_python
    [ -z "${TORCH_INDEX:-}" ] || set -- "$@" --index "$TORCH_INDEX" --index-strategy unsafe-best-match
else
    say "uv could not be installed; pip does it, more slowly"
    set -- $pip install --retries 8 --timeout 180
    [ -z "${TORCH_INDEX:-}" ] || set -- "$@" --extra-index-url "$TORCH_INDEX"
fi

say "installing $(wc -l < "$list") packages from $list"
retry "$@" --no-deps -r "$list" || die "the installation from $list failed; the lines above say why"

# PyPI's torch is the CUDA build: it does not import without CUDA libraries that a CPU list does not hold.
if ! $venv_python -c 'import torch' 2>/dev/null; then
    say "torch does not import: this is the build for CUDA. Installing its libraries, several GB."
    say "To avoid that: \`make clean\`, then set TORCH_INDEX to PyTorch's wheel index for CPU builds."
    retry "$@" --constraint "$list" "$(grep '^torch==' "$list")" || die "torch's dependencies could not be installed"
    $venv_python -c 'import torch' || die "torch does not import; the traceback above says why"
fi

"$@" --no-deps --no-build-isolation --editable . || die "this project could not be installed; the lines above say why"

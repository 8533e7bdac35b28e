#!/bin/sh
# Regenerate requirements/cpu.txt and gpu.txt: complete pinned lists without hosts or paths, good for Python 3.11 to 3.13.
# The 3.11 resolution is the base; the few packages that only newer Pythons need are added at the base's versions.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
[ -n "${UV_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${PIP_FIND_LINKS:-}"
for kind in cpu gpu; do
    compile() {
        "$uv" pip compile pyproject.toml --extra "$kind" --extra dev --override "requirements/overrides-$kind.txt" \
            --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-find-links --no-emit-index-url -q "$@"
    }
    base=$(mktemp) && newer=$(mktemp)
    compile -p 3.11 -o "$base"
    compile -p 3.13 -c "$base" -o "$newer"
    # A local tag such as +cpu names the machine's wheel, not the version.
    cat "$base" "$newer" | sed 's/+cpu$//' | sort -u > "requirements/$kind.txt"
    rm -f "$base" "$newer"
    repeated=$(sed 's/==.*//' "requirements/$kind.txt" | sort | uniq -d)
    [ -z "$repeated" ] || { echo "two versions of: $repeated" >&2; exit 1; }
    echo "requirements/$kind.txt: $(wc -l < "requirements/$kind.txt") packages"
done

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a patched, verified MAX wheel into dist/. --help lists the options.
set -euo pipefail
called_from=$PWD
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
. scripts/environment.sh
prepare build/work/tools build
cd "$called_from" # so that relative paths mean what the caller meant
PYTHONPATH="$root/scripts" exec "$root/build/work/tools/bin/python" -P -m maxpatch build "$@"

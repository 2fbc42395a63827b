#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lints, type-checks and tests. Builds the wheel it tests.
# usage: test.sh [--full | --slow] [PYTEST-ARGUMENT...]
#   --full  also the tests against torch and transformers (large downloads)
#   --slow  only the tests that take many minutes (GPU targets, 26.5.0)
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
case ${1-} in
--full) shift; folder=tools-full groups=(build test full) marks="not slow" ;;
--slow) shift; folder=tools-test groups=(build test) marks="slow" ;;
*) folder=tools-test groups=(build test) marks="not full and not slow" ;;
esac
prepare "build/work/$folder" "${groups[@]}"
# OpenBLAS's threads spin: on a busy machine small matrices took a hundred times
# as long with them.
export OPENBLAS_NUM_THREADS=1
python=$PWD/build/work/$folder/bin/python
echo "lint and type-check"
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
exec "$python" -m pytest -m "$marks" "$@"

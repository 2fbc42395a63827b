# SPDX-License-Identifier: Apache-2.0
"""Tests of the series, the overlay, the builder and the harness."""

# SPDX-License-Identifier: Apache-2.0
"""Measures what the patched MAX gains over the untouched one.

    python -m throughput.capture           time three arms, fresh servers
    python -m throughput.report            print the table of a results file
    python -m throughput.capture_equality  compare greedy tokens

`server` starts and stops one `max serve`; `client` streams one chat request;
`fixed_batches` runs a model in its own process over batches that a plan fixes.
"""

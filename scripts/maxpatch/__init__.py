# SPDX-License-Identifier: Apache-2.0
"""Builds patched, verified MAX wheels from a patch series and an overlay."""

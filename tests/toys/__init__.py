# SPDX-License-Identifier: Apache-2.0
"""Models with random weights, made in code, and their reference forms."""

# SPDX-License-Identifier: Apache-2.0
"""What the AttnQuant architectures share."""

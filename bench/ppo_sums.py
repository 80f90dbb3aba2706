"""Sums of digits learned from rewards with a critic, by five seeds: as bench/grpo_sums.py.

One answer to each prompt; a divergence of 0.1 holds the model near what it was taught.

    python bench/ppo_sums.py [--seeds N] [--out FILE] [--plot FILE]
"""

import sys

import grpo_sums

if __name__ == "__main__":
    sys.exit(grpo_sums.main("ppo"))

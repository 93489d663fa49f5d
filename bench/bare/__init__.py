"""References that benchmarks compare with: the same hops and bytes without Tandem's logic."""

"""Small kernels in the documented style: broken ones, one rule each; clean ones at the rules' limits; racy pairs."""

"""From completions to rewards, from rewards to advantages."""

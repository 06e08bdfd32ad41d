"""From a RunConfig to a Plan: paths, layout, options, and the rules that refuse some of them."""

"""The numbers of a step: their catalogue, how they are taken and added up, and the charts of them."""

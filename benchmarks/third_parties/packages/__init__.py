"""One file a package or a kind of them; each has CASES. What is not installed is listed as such."""

from third_parties.torchvision_operators import declare

declare()

"""The contract: types of arrays, plans and routing replays, and what must hold of them."""

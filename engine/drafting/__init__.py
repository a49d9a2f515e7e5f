"""Where drafted chains come from: each drafter proposes tokens and says from which law it drew them."""

"""Who owns which prompt: reservations, attempts, capacities, buffer, leases, holds. Knows neither torch nor Ray."""

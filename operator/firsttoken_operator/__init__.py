"""The kopf operator."""

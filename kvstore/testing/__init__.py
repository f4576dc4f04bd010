"""What plugin authors test with: conformance suites, doubles and a pytest plugin."""

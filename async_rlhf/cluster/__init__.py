"""Ray: generators and rewards on a cluster."""

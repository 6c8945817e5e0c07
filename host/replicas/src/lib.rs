//! What gateways of one fleet tell each other over NATS.

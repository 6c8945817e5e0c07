//! Probing of workers.

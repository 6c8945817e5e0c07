//! The endpoint picker that Envoy asks over `ext_proc`.

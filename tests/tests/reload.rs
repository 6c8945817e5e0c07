//! Reload: every key of the schema is either applied by a reload or reported as needing a restart.

mod reload {
    pub mod effects;
    pub mod keys;
    pub mod schema;
}

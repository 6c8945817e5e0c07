//! The client while its request runs: whether it reads, and what continues after it left.

pub(crate) mod after_disconnect;
pub(crate) mod connection;
pub(crate) mod unread_booking;

//! What an engine keeps of a request for later ones, and which worker that is: sessions, media and responses.

pub(crate) mod cached_media;
pub(crate) mod engine_session;
mod session;
pub(crate) mod stored;

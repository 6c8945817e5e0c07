//! What a connection tells its requests.

use axum::Router;
use hyper::{Request, body::Incoming};
use tokio::time::Instant;

use super::{
    first_byte::FirstByte,
    peer::{ClientCertificate, Peer},
};
use crate::orchestrate::client_connection::ClientConnection;

/// A connection as its requests know it.
pub(super) struct Connected {
    pub(super) routes: Router,
    pub(super) peer: Peer,
    pub(super) certificate: Option<ClientCertificate>,
}

impl Connected {
    /// Tells a request, whose first byte arrived at `first`, whom it comes from.
    pub(super) fn introduce(
        &self,
        request: &mut Request<Incoming>,
        first: Instant,
        client: &ClientConnection,
    ) {
        let extensions = request.extensions_mut();
        extensions.insert(FirstByte(first));
        extensions.insert(client.clone());
        extensions.insert(self.peer);
        if let Some(certificate) = &self.certificate {
            extensions.insert(certificate.clone());
        }
    }
}

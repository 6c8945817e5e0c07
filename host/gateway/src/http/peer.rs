//! The other end of a connection: its address, and the names in its verified certificate. Both are extensions
//! of its requests.

use std::{net::IpAddr, sync::Arc};

use axum::http::Extensions;

use crate::tls::CertificateNames;

/// The address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub(crate) IpAddr);

impl Peer {
    /// Returns the address of a request's connection; the unspecified one when there is no connection.
    pub(crate) fn of(extensions: &Extensions) -> IpAddr {
        extensions.get::<Self>().map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.0)
    }
}

/// The certificate that a client proved to own. The listener's authority signed it, and the listener's list
/// of names admits it.
#[derive(Clone, Debug)]
pub(crate) struct ClientCertificate(Arc<CertificateNames>);

impl ClientCertificate {
    pub(super) fn new(names: CertificateNames) -> Self {
        Self(Arc::new(names))
    }

    /// Returns the names in it.
    pub(crate) fn names(&self) -> &CertificateNames {
        &self.0
    }
}

/// What a connection says about who sends its requests.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    /// The address.
    pub(crate) address: IpAddr,
    /// The client's certificate; `None`: it sent none.
    pub(crate) certificate: Option<ClientCertificate>,
}

impl Sender {
    /// Returns the sender of a request.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        Self { address: Peer::of(extensions), certificate: extensions.get::<ClientCertificate>().cloned() }
    }
}

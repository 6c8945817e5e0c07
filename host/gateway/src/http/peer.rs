//! The other end of a connection: its address, and the names in its verified certificate.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use crate::tls::CertificateNames;

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

/// Sender of a connection's requests.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    /// The address; the unspecified one when there is no connection.
    pub(crate) address: IpAddr,
    /// The client's certificate; `None` if it sent none.
    pub(crate) certificate: Option<ClientCertificate>,
}

impl Sender {
    /// A sender of whom only the address is known.
    pub(crate) fn at(address: IpAddr) -> Self {
        Self { address, certificate: None }
    }
}

impl Default for Sender {
    fn default() -> Self {
        Self::at(Ipv4Addr::UNSPECIFIED.into())
    }
}

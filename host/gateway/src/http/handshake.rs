//! The TLS handshake of a connection: within its time, and with a reason when it fails.

use std::{
    io::{self, ErrorKind},
    net::IpAddr,
};

use pointsman_workers::LogLimit;
use rustls::{CertificateError, Error, PeerIncompatible};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Duration, Instant, timeout_at},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{client_socket::ClientSocket, peer::ClientCertificate, refuse_connection::plain_text};
use crate::tls::{CertificateNames, Handshake};

/// Bytes that TLS may hold for a client that does not read, besides the record that is written.
const MAX_BUFFER: usize = 32 * 1024;
/// How long the answer to a plain HTTP request may take.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// A connection after its handshake.
pub(super) struct Secured {
    pub(super) stream: TlsStream<ClientSocket>,
    /// The certificate of the client, if it has one.
    pub(super) certificate: Option<ClientCertificate>,
}

/// Performs the handshake.
///
/// # Errors
/// Why it failed, as a label. The client was told, and the connection has ended.
pub(super) async fn accept(
    mut socket: ClientSocket,
    handshake: &Handshake,
    peer: IpAddr,
) -> Result<Secured, &'static str> {
    let until = Instant::now() + handshake.timeout;
    match timeout_at(until, socket.peek()).await {
        Err(_) => return failed(peer, "timeout"),
        Ok(Err(_) | Ok(None)) => return failed(peer, "closed"),
        // No TLS record begins with a letter, and every HTTP request does.
        Ok(Ok(Some(first))) if first.is_ascii_alphabetic() => {
            let answer = async {
                socket.write_all(plain_text().as_bytes()).await?;
                socket.shutdown().await
            };
            let _ = tokio::time::timeout(ANSWER_TIME, answer).await;
            return failed(peer, "plain_http");
        }
        Ok(Ok(Some(_))) => {}
    }
    let accept = TlsAcceptor::from(handshake.config.clone()).accept(socket).into_fallible();
    let mut stream = match timeout_at(until, accept).await {
        Err(_) => return failed(peer, "timeout"),
        Ok(Err((error, mut socket))) => {
            let reason = reason(&error);
            if reason != "closed" {
                // Unread bytes of the client would turn the alert that names the problem into a reset.
                let _ = socket.shutdown().await;
            }
            return failed(peer, reason);
        }
        Ok(Ok(stream)) => stream,
    };
    let connection = stream.get_mut().1;
    connection.set_buffer_limit(Some(MAX_BUFFER));
    let certificate = connection.peer_certificates().and_then(|chain| chain.first());
    let certificate =
        certificate.map(|first| ClientCertificate::new(CertificateNames::of(first).unwrap_or_default()));
    Ok(Secured { stream, certificate })
}

/// Logs a failed handshake, at most once a second, and returns its reason.
fn failed<T>(peer: IpAddr, reason: &'static str) -> Result<T, &'static str> {
    static LINES: LogLimit = LogLimit::new(Duration::from_secs(1));
    if let Some(suppressed) = LINES.due() {
        tracing::info!(address = %peer, reason, suppressed, "TLS handshake failed");
    }
    Err(reason)
}

/// Why a handshake failed: one of a fixed list.
fn reason(error: &io::Error) -> &'static str {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<Error>());
    let Some(cause) = cause else {
        return if error.kind() == ErrorKind::TimedOut { "timeout" } else { "closed" };
    };
    match cause {
        Error::PeerIncompatible(
            PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::ServerDoesNotSupportTls12Or13
            | PeerIncompatible::SupportedVersionsExtensionRequired
            // A client of TLS 1.1 or older has no such extension.
            | PeerIncompatible::SignatureAlgorithmsExtensionRequired,
        ) => "version",
        Error::PeerIncompatible(_) => "no_common_cipher",
        Error::NoApplicationProtocol => "no_common_protocol",
        Error::NoCertificatesPresented => "certificate_missing",
        Error::InvalidCertificate(problem) => match problem {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => "certificate_expired",
            CertificateError::UnknownIssuer => "certificate_unknown_authority",
            CertificateError::ApplicationVerificationFailure => "certificate_name",
            _ => "certificate_invalid",
        },
        Error::AlertReceived(_) => "refused_by_client",
        _ => "malformed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_come_from_a_fixed_list() {
        let of = |error: Error| reason(&io::Error::new(ErrorKind::InvalidData, error));
        assert_eq!(of(Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered)), "version");
        assert_eq!(of(Error::InvalidCertificate(CertificateError::Expired)), "certificate_expired");
        assert_eq!(of(Error::General("x".to_owned())), "malformed");
        assert_eq!(reason(&ErrorKind::UnexpectedEof.into()), "closed");
        assert_eq!(reason(&ErrorKind::TimedOut.into()), "timeout");
    }
}

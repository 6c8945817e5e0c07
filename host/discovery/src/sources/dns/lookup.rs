//! One question for SRV records: over UDP, and over TCP when the answer does not fit.

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, TYPE, rdata::RData};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
};

/// Largest answer over UDP that is read, bytes.
const MAX_DATAGRAM: usize = 4_096;
/// Answers over UDP to other questions that are passed over.
const MAX_STRAYS: usize = 16;
/// Flags in the third byte of a message (RFC 1035, section 4.1.1).
const RESPONSE: u8 = 0x80;
const TRUNCATED: u8 = 0x02;

/// The answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Records {
    /// Hosts and ports.
    pub(super) targets: BTreeSet<(String, u16)>,
    /// How long the records hold.
    pub(super) ttl: Duration,
}

/// Asks `server` for the SRV records of `name`.
///
/// # Errors
/// The server does not answer, refuses, or knows no such records.
pub(super) async fn srv(name: &str, server: SocketAddr) -> Result<Records, String> {
    let name = name.trim_end_matches('.');
    let asked = Name::new(name).map_err(|error| format!("`{name}` is not a domain name: {error}"))?;
    let id = rand::random::<u16>();
    let mut query = Packet::new_query(id);
    query.set_flags(PacketFlag::RECURSION_DESIRED);
    let question = Question::new(asked, QTYPE::TYPE(TYPE::SRV), QCLASS::CLASS(CLASS::IN), false);
    query.questions.push(question);
    let query = query.build_bytes_vec().map_err(|error| format!("writing the question: {error}"))?;
    match over_udp(&query, id, name, server).await? {
        Answer::Records(records) => Ok(records),
        Answer::Truncated => match read(&over_tcp(&query, server).await?, id, name)? {
            Some(Answer::Records(records)) => Ok(records),
            _ => Err("the answer over TCP is not that to the question".to_owned()),
        },
    }
}

enum Answer {
    Records(Records),
    /// The records do not fit: they have to be asked for over TCP.
    Truncated,
}

async fn over_udp(query: &[u8], id: u16, name: &str, server: SocketAddr) -> Result<Answer, String> {
    let problem = |error: std::io::Error| error.to_string();
    let any = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await.map_err(problem)?;
    // Datagrams from other addresses are dropped.
    socket.connect(server).await.map_err(problem)?;
    socket.send(query).await.map_err(problem)?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    for _ in 0..MAX_STRAYS {
        let length = socket.recv(&mut buffer).await.map_err(problem)?;
        if let Some(answer) = read(buffer.get(..length).unwrap_or_default(), id, name)? {
            return Ok(answer);
        }
    }
    Err(format!("{MAX_STRAYS} answers to other questions"))
}

async fn over_tcp(query: &[u8], server: SocketAddr) -> Result<Vec<u8>, String> {
    let exchange = async {
        let mut stream = TcpStream::connect(server).await?;
        let length = u16::try_from(query.len()).unwrap_or(u16::MAX);
        stream.write_all(&[&length.to_be_bytes(), query].concat()).await?;
        let mut answer = vec![0; usize::from(stream.read_u16().await?)];
        stream.read_exact(&mut answer).await?;
        Ok(answer)
    };
    exchange.await.map_err(|error: std::io::Error| format!("over TCP: {error}"))
}

/// Reads an answer; `None` if it is not that to our question.
fn read(bytes: &[u8], id: u16, name: &str) -> Result<Option<Answer>, String> {
    let Some([high, low, flags, _]) = bytes.first_chunk() else { return Ok(None) };
    if u16::from_be_bytes([*high, *low]) != id || flags & RESPONSE == 0 {
        return Ok(None);
    }
    // It may end within a record.
    if flags & TRUNCATED != 0 {
        return Ok(Some(Answer::Truncated));
    }
    let Ok(packet) = Packet::parse(bytes) else { return Ok(None) };
    let same = |question: &Question<'_>| question.qname.to_string().eq_ignore_ascii_case(name);
    if !packet.questions.first().is_some_and(same) {
        return Ok(None);
    }
    match packet.rcode() {
        RCODE::NoError => {}
        RCODE::NameError => return Err("the name does not exist (NXDOMAIN)".to_owned()),
        other => return Err(format!("the server answered {other:?}")),
    }
    let (mut targets, mut ttl) = (BTreeSet::new(), u32::MAX);
    for record in &packet.answers {
        if let RData::SRV(srv) = &record.rdata {
            ttl = ttl.min(record.ttl);
            targets.insert((srv.target.to_string().to_ascii_lowercase(), srv.port));
        }
    }
    if targets.is_empty() {
        return Err("the name has no SRV records".to_owned());
    }
    Ok(Some(Answer::Records(Records { targets, ttl: Duration::from_secs(ttl.into()) })))
}

//! One question for SRV records, or for addresses: over TCP, and over UDP to servers that do not answer so.
//!
//! Some servers, such as Consul, leave records out of an answer over UDP and do not say so.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, Question, RCODE, TYPE, rdata::RData};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpStream, UdpSocket},
    time::{Instant, timeout, timeout_at},
};

/// Largest answer over UDP that is read, bytes.
const MAX_DATAGRAM: usize = 4_096;
/// Answers over UDP to other questions that are passed over.
const MAX_STRAYS: usize = 16;
/// How long a server that answered over UDP alone is not asked over TCP first.
const WITHOUT_TCP: Duration = Duration::from_secs(60);
/// How long a server that answered over TCP is not asked over UDP: records may be missing there.
const WITH_TCP: Duration = Duration::from_secs(600);
/// Flags in the third byte of a message (RFC 1035, section 4.1.1).
const RESPONSE: u8 = 0x80;
const TRUNCATED: u8 = 0x02;

/// The answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Records {
    /// Hosts and ports.
    pub(super) targets: BTreeSet<(String, u16)>,
    /// Addresses of hosts that the server added to its answer.
    pub(super) addresses: BTreeMap<String, Vec<IpAddr>>,
    /// How long the records hold.
    pub(super) ttl: Duration,
}

/// How servers answered last.
#[derive(Debug, Default)]
pub(super) struct Transports {
    by_server: HashMap<SocketAddr, Transport>,
}

#[derive(Clone, Copy, Debug)]
enum Transport {
    /// Over TCP, at this time or before.
    Tcp(Instant),
    /// Over UDP, and not over TCP.
    Udp(Instant),
}

/// What is asked for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Srv,
    V4,
    V6,
}

/// A question for the records of a name.
struct Query<'a> {
    name: &'a str,
    kind: Kind,
    id: u16,
    bytes: Vec<u8>,
}

impl Transports {
    /// Asks `server` for the SRV records of `name`.
    ///
    /// # Errors
    /// The server does not answer within `limit`, refuses, or knows no such records.
    pub(super) async fn srv(
        &mut self,
        name: &str,
        server: SocketAddr,
        limit: Duration,
    ) -> Result<Records, String> {
        self.ask(name, Kind::Srv, server, limit).await
    }

    /// Asks `server` for the addresses of a host. Returns no address if the server does not know the host.
    ///
    /// # Errors
    /// The server does not answer within `limit`, or answers that it failed.
    pub(super) async fn addresses(
        &mut self,
        name: &str,
        server: SocketAddr,
        limit: Duration,
    ) -> Result<Records, String> {
        let mut records = self.ask(name, Kind::V4, server, limit).await?;
        match self.ask(name, Kind::V6, server, limit).await {
            Ok(more) => {
                records.ttl = records.ttl.min(more.ttl);
                for (name, addresses) in more.addresses {
                    records.addresses.entry(name).or_default().extend(addresses);
                }
            }
            Err(problem) if records.addresses.values().all(Vec::is_empty) => return Err(problem),
            Err(_) => {}
        }
        Ok(records)
    }

    /// Asks `server` for the records of `name`. Half of the time is left for UDP, unless the server ever
    /// answered over TCP.
    ///
    /// # Errors
    /// Same as [`Transports::srv`].
    async fn ask(
        &mut self,
        name: &str,
        kind: Kind,
        server: SocketAddr,
        limit: Duration,
    ) -> Result<Records, String> {
        let query = Query::new(name.trim_end_matches('.'), kind)?;
        self.by_server.retain(|_, how| !matches!(how, Transport::Udp(at) if at.elapsed() >= WITHOUT_TCP));
        let known = self.by_server.get(&server).copied();
        let (silent, deadline) = (|_| format!("no answer within {limit:?}"), Instant::now() + limit);
        if !matches!(known, Some(Transport::Udp(_))) {
            let for_tcp = if known.is_some() { limit } else { limit / 2 };
            let (problem, is_refused) = match timeout(for_tcp, query.over_tcp(server)).await {
                Ok(Ok(answer)) => {
                    self.by_server.insert(server, Transport::Tcp(Instant::now()));
                    return query.records(&answer);
                }
                Ok(Err(error)) => (tcp_problem(&error), error.kind() == io::ErrorKind::ConnectionRefused),
                Err(elapsed) => (silent(elapsed), false),
            };
            if let Some(Transport::Tcp(at)) = known
                && (!is_refused || at.elapsed() < WITH_TCP)
            {
                return Err(problem);
            }
        }
        let over_udp = async {
            match query.over_udp(server).await? {
                Answer::Truncated => {
                    let answer = query.over_tcp(server).await;
                    query.records(&answer.map_err(|error| tcp_problem(&error))?)
                }
                Answer::Records(records) => Ok(records),
            }
        };
        let answered = timeout_at(deadline, over_udp).await.map_err(silent).flatten();
        if answered.is_ok() && known.is_none() {
            self.by_server.insert(server, Transport::Udp(Instant::now()));
        }
        answered
    }
}

fn tcp_problem(error: &io::Error) -> String {
    format!("over TCP: {error}")
}

enum Answer {
    Records(Records),
    /// The records do not fit: they have to be asked for over TCP.
    Truncated,
}

impl<'a> Query<'a> {
    fn new(name: &'a str, kind: Kind) -> Result<Self, String> {
        let asked = Name::new(name).map_err(|error| format!("`{name}` is not a domain name: {error}"))?;
        let id = rand::random::<u16>();
        let mut query = Packet::new_query(id);
        query.set_flags(PacketFlag::RECURSION_DESIRED);
        let kind_of_record = match kind {
            Kind::Srv => TYPE::SRV,
            Kind::V4 => TYPE::A,
            Kind::V6 => TYPE::AAAA,
        };
        let question = Question::new(asked, QTYPE::TYPE(kind_of_record), QCLASS::CLASS(CLASS::IN), false);
        query.questions.push(question);
        let bytes = query.build_bytes_vec().map_err(|error| format!("writing the question: {error}"))?;
        Ok(Self { name, kind, id, bytes })
    }

    async fn over_udp(&self, server: SocketAddr) -> Result<Answer, String> {
        let problem = |error: io::Error| error.to_string();
        let any = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await.map_err(problem)?;
        // Datagrams from other addresses are dropped.
        socket.connect(server).await.map_err(problem)?;
        socket.send(&self.bytes).await.map_err(problem)?;
        let mut buffer = vec![0; MAX_DATAGRAM];
        for _ in 0..MAX_STRAYS {
            let length = socket.recv(&mut buffer).await.map_err(problem)?;
            if let Some(answer) = self.read(buffer.get(..length).unwrap_or_default())? {
                return Ok(answer);
            }
        }
        Err(format!("{MAX_STRAYS} answers to other questions"))
    }

    async fn over_tcp(&self, server: SocketAddr) -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(server).await?;
        let length = u16::try_from(self.bytes.len()).unwrap_or(u16::MAX);
        stream.write_all(&[&length.to_be_bytes(), &self.bytes[..]].concat()).await?;
        let mut answer = vec![0; usize::from(stream.read_u16().await?)];
        stream.read_exact(&mut answer).await?;
        Ok(answer)
    }

    /// Reads an answer over TCP.
    fn records(&self, answer: &[u8]) -> Result<Records, String> {
        match self.read(answer)? {
            Some(Answer::Records(records)) => Ok(records),
            _ => Err("the answer over TCP is not that to the question".to_owned()),
        }
    }

    /// Reads an answer; `None` if it is not that to our question.
    fn read(&self, bytes: &[u8]) -> Result<Option<Answer>, String> {
        let Some([high, low, flags, _]) = bytes.first_chunk() else { return Ok(None) };
        if u16::from_be_bytes([*high, *low]) != self.id || flags & RESPONSE == 0 {
            return Ok(None);
        }
        // It may end within a record.
        if flags & TRUNCATED != 0 {
            return Ok(Some(Answer::Truncated));
        }
        let Ok(packet) = Packet::parse(bytes) else { return Ok(None) };
        let same = |question: &Question<'_>| question.qname.to_string().eq_ignore_ascii_case(self.name);
        if !packet.questions.first().is_some_and(same) {
            return Ok(None);
        }
        match packet.rcode() {
            RCODE::NoError => {}
            // It has no addresses for the host, or answers only for names of other zones.
            other if self.kind != Kind::Srv && other != RCODE::ServerFailure => {}
            RCODE::NameError => return Err("the name does not exist (NXDOMAIN)".to_owned()),
            other => return Err(format!("the server answered {other:?}")),
        }
        let records = if self.kind == Kind::Srv { of_service(&packet)? } else { of_host(self.name, &packet) };
        Ok(Some(Answer::Records(records)))
    }
}

/// Reads the records of a service, and the addresses that the server added.
fn of_service(packet: &Packet<'_>) -> Result<Records, String> {
    let (mut targets, mut ttl) = (BTreeSet::new(), u32::MAX);
    for record in &packet.answers {
        if let RData::SRV(srv) = &record.rdata {
            ttl = ttl.min(record.ttl);
            let target = srv.target.to_string().to_ascii_lowercase();
            // The root as target says that the service is not offered (RFC 2782).
            if !target.trim_end_matches('.').is_empty() && srv.port != 0 {
                targets.insert((target, srv.port));
            }
        }
    }
    if targets.is_empty() {
        return Err("the name has no SRV records".to_owned());
    }
    let mut addresses: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for record in &packet.additional_records {
        let name = record.name.to_string().to_ascii_lowercase();
        if let Some(address) = address(&record.rdata)
            && targets.iter().any(|(target, _)| *target == name)
        {
            ttl = ttl.min(record.ttl);
            addresses.entry(name).or_default().push(address);
        }
    }
    Ok(Records { targets, addresses, ttl: Duration::from_secs(ttl.into()) })
}

/// Reads the addresses of a host. A server that resolves aliases gives them under another name.
fn of_host(name: &str, packet: &Packet<'_>) -> Records {
    let found = || packet.answers.iter().filter_map(|record| Some((address(&record.rdata)?, record.ttl)));
    let ttl = found().map(|(_, ttl)| ttl).min().unwrap_or(u32::MAX);
    let addresses = BTreeMap::from([(name.to_owned(), found().map(|(address, _)| address).collect())]);
    Records { targets: BTreeSet::new(), addresses, ttl: Duration::from_secs(ttl.into()) }
}

fn address(record: &RData<'_>) -> Option<IpAddr> {
    match record {
        RData::A(a) => Some(Ipv4Addr::from(a.address).into()),
        RData::AAAA(aaaa) => Some(Ipv6Addr::from(aaaa.address).into()),
        _ => None,
    }
}

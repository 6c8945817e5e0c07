//! The network of an address, which one client is known by.

use std::net::{IpAddr, Ipv6Addr};

/// Returns the address, for IPv6 the /64 network: a host may have any address in it.
#[must_use]
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn l4_the_addresses_of_an_ipv6_network_are_one_client() {
        let network = |text: &str| super::network(text.parse().unwrap());
        // L4.1
        assert_eq!(network("2001:db8::1"), network("2001:db8::2"));
        assert_ne!(network("2001:db8::1"), network("2001:db8:0:1::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
    }
}

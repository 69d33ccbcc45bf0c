//! Where the processes of other machines find one of this machine.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};

/// Addresses of a port of this machine that others may reach: the one that its route to the internet has, the one that
/// its name has, and the one that only itself reaches.
pub fn of_this_machine(port: u16) -> Vec<SocketAddr> {
    // Documentation addresses are never used: nothing is sent there, it only decides the route.
    let routed = towards((Ipv4Addr::new(192, 0, 2, 1), 9));
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let named = (name.as_str(), 0).to_socket_addrs().into_iter().flatten().map(|found| found.ip());
    let mut all: Vec<IpAddr> =
        routed.into_iter().chain(named).filter(|ip| !ip.is_loopback()).collect();
    all.push(Ipv4Addr::LOCALHOST.into());
    all.dedup();
    all.into_iter().map(|ip| SocketAddr::from((ip, port))).collect()
}

/// This machine's own address on the way to another one.
pub fn towards(other: impl ToSocketAddrs) -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(other).ok()?;
    Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified())
}

/// A word that nobody guesses.
pub fn random_token() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // The standard library's keys come from the system's random numbers.
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_reaches_itself() {
        let addresses = of_this_machine(80);
        assert!(addresses.contains(&SocketAddr::from((Ipv4Addr::LOCALHOST, 80))), "{addresses:?}");
        assert_eq!(towards((Ipv4Addr::LOCALHOST, 9)), Some(Ipv4Addr::LOCALHOST.into()));
        let (one, other) = (random_token(), random_token());
        assert!(one != other && one.len() == 32, "{one} {other}");
    }
}

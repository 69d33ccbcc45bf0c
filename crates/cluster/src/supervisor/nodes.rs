//! The machines of a job.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::address;

/// A machine, and how many ranks it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// A name or an address that `ssh` knows.
    pub name: String,
    /// One per GPU.
    pub ranks: usize,
}

impl Node {
    /// This machine.
    pub fn local(ranks: usize) -> Self {
        Self { name: "localhost".into(), ranks }
    }

    /// Whether it is this machine.
    pub fn is_local(&self) -> bool {
        let own = rustix::system::uname();
        let own = own.nodename().to_string_lossy();
        let is_own_name = self.name == own || own.split('.').next() == Some(self.name.as_str());
        // The way to an address of this machine begins at that address.
        let is_own = |ip: IpAddr| address::towards((ip, 9)) == Some(ip);
        self.name == "localhost" || is_own_name || self.name.parse().is_ok_and(is_own)
    }
}

impl FromStr for Node {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text} is not a node, expected a name such as spark.local or spark.local:2")
        };
        let (name, ranks) = match text.rsplit_once(':') {
            Some((name, ranks)) => (name, ranks.parse().map_err(|_| wrong())?),
            None => (text, 1),
        };
        // What the launcher would take for an option, or for several nodes.
        let is_name = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
        let is_plain = name.chars().all(is_name) && !name.starts_with('-') && !name.is_empty();
        if !is_plain || !(1..=1024).contains(&ranks) {
            return Err(wrong());
        }
        Ok(Self { name: name.into(), ranks })
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranks {
            1 => f.write_str(&self.name),
            ranks => write!(f, "{}:{ranks}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_names_with_ranks() {
        let node = |text: &str| text.parse::<Node>();
        assert_eq!(node("spark.local:2"), Ok(Node { name: "spark.local".into(), ranks: 2 }));
        assert_eq!(node("me@10.0.0.2").unwrap().ranks, 1);
        assert_eq!(node("localhost").unwrap(), Node::local(1));
        assert!(node("localhost").unwrap().is_local() && node("127.0.0.1").unwrap().is_local());
        assert!(!node("spark.local").unwrap().is_local());
        for wrong in ["", ":2", "a:0", "a:x", "-oProxy=x", "a b", "a;b", "a:2000", "a:-1"] {
            assert!(node(wrong).is_err(), "{wrong}");
        }
    }
}

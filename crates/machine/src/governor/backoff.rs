//! How long to wait before something is tried again that did not last: twice as long each time, up to a
//! bound. This is what keeps every rule from going back and forth.

/// When to try again.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    first: f64,
    most: f64,
    soon: f64,
    wait: f64,
    taken: f64,
    until: f64,
}

impl Backoff {
    /// The first wait and the longest, in seconds; what lasts for longer than `soon` did last.
    pub fn new(first: f64, most: f64, soon: f64) -> Self {
        Self { first, most, soon, wait: first, taken: f64::NEG_INFINITY, until: f64::NEG_INFINITY }
    }

    /// Whether it may be tried.
    pub fn is_ready(&self, now: f64) -> bool {
        now >= self.until
    }

    /// It was tried.
    pub fn start(&mut self, now: f64) {
        self.taken = now;
    }

    /// It had to be given up. What was never tried, or lasted, may be tried again at once.
    pub fn fail(&mut self, now: f64) {
        if self.is_recent(now) {
            self.until = now + self.wait;
            self.wait = (2.0 * self.wait).min(self.most);
        } else {
            self.wait = self.first;
        }
    }

    /// Whether it was tried so lately that giving it up means it was a mistake.
    pub fn is_recent(&self, now: f64) -> bool {
        now - self.taken <= self.soon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_twice_the_one_before() {
        let mut patience = Backoff::new(10.0, 30.0, 5.0);
        // Nobody tried it yet: no mistake of ours.
        patience.fail(0.0);
        assert!(patience.is_ready(0.0));
        for (now, wait) in [(100.0, 10.0), (200.0, 20.0), (300.0, 30.0), (400.0, 30.0)] {
            patience.start(now);
            patience.fail(now + 1.0);
            assert!(!patience.is_ready(now + wait));
            assert!(patience.is_ready(now + 1.0 + wait));
        }
        patience.start(500.0);
        patience.fail(506.0);
        assert!(patience.is_ready(506.0), "it lasted");
    }
}

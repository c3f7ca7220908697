//! A session with the guest's own PostgreSQL, for a tier each of whose requests is a transaction. `psql` speaks with the server: its statements go in
//! by a pipe, its rows come out by another, and a line that it is told to print says where an answer ends.
//!
//! What can go wrong: a statement fails. `psql` ends then (`ON_ERROR_STOP`), the server undoes the transaction, and whoever asked sees the pipe's end.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
};

use crate::workload::{DATABASE, as_postgres};

/// Accounts that a key may be about: those of a database of scale 1.
const ACCOUNTS: u64 = 100_000;
/// Tellers of such a database, all of its one branch.
const TELLERS: u64 = 10;
/// What ends an answer.
const END: &str = "-- end";
/// The longest line that makes sense, in bytes.
const LONGEST: u64 = 256;

/// An open session. Dropping it ends it, and undoes a transaction that is under way.
#[derive(Debug)]
pub(crate) struct Sql {
    child: Child,
    into: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Sql {
    /// Opens one.
    ///
    /// # Errors
    /// When there is no `psql` here. That there is no database shows with the first transaction.
    pub fn open() -> io::Result<Self> {
        let mut command = as_postgres(["psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", DATABASE]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (into, from) = (child.stdin.take(), child.stdout.take());
        let from = BufReader::new(from.ok_or(io::ErrorKind::BrokenPipe)?);
        Ok(Self { child, into, from })
    }

    /// TPC-B's transaction, as `pgbench` has it, on the account of a key. What the account says of itself that no transaction changes: its number, and its
    /// branch's.
    ///
    /// # Errors
    /// When a statement fails, or the database is gone: the session is over.
    pub fn transact(&mut self, key: u64) -> io::Result<(u64, u64)> {
        let into = self.into.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        into.write_all(transaction(key).as_bytes())?;
        into.flush()?;
        let mut lines = vec![];
        loop {
            let mut line = String::new();
            if (&mut self.from).take(LONGEST).read_line(&mut line)? == 0 {
                return Err(io::Error::other("the database refused the transaction, or is gone"));
            }
            match line.trim_end() {
                END => return answer(&lines),
                line => lines.push(line.to_owned()),
            }
        }
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        drop(self.into.take());
        // It may wait for a row that another transaction holds.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Which account a key is about.
const fn account(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15) % ACCOUNTS + 1
}

fn transaction(key: u64) -> String {
    let (account, teller, delta) = (account(key), key % TELLERS + 1, key % 10_001);
    format!(
        "BEGIN;\n\
         UPDATE pgbench_accounts SET abalance = abalance + {delta} WHERE aid = {account};\n\
         SELECT abalance FROM pgbench_accounts WHERE aid = {account};\n\
         UPDATE pgbench_tellers SET tbalance = tbalance + {delta} WHERE tid = {teller};\n\
         UPDATE pgbench_branches SET bbalance = bbalance + {delta} WHERE bid = 1;\n\
         INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES ({teller}, 1, {account}, {delta}, CURRENT_TIMESTAMP);\n\
         END;\n\
         SELECT aid, bid FROM pgbench_accounts WHERE aid = {account};\n\
         \\echo {END}\n"
    )
}

/// The balance, which is another each time, and then what stays.
fn answer(lines: &[String]) -> io::Result<(u64, u64)> {
    let understood = match lines {
        [balance, account] if balance.parse::<i64>().is_ok() => {
            account.split_once('|').and_then(|(account, branch)| Some((account.parse().ok()?, branch.parse().ok()?)))
        }
        _ => None,
    };
    understood.ok_or_else(|| io::Error::other(format!("the database's answer is not understood: {lines:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_the_account_that_was_asked_for_and_nothing_else_is_one() {
        let lines = |text: &[&str]| text.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        assert_eq!(answer(&lines(&["-412", "17|1"])).unwrap(), (17, 1));
        for bad in [&["17|1"][..], &["1", "17"], &["x", "17|1"], &["1", "17|x"], &["1", "17|1", "2"], &[]] {
            assert!(answer(&lines(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn keys_are_of_many_accounts_and_each_of_the_same_one() {
        let accounts: std::collections::BTreeSet<u64> = (0..256).map(account).collect();
        assert!(accounts.len() > 250 && accounts.iter().all(|account| (1..=ACCOUNTS).contains(account)));
        assert!(transaction(7).contains(&format!("aid = {};", account(7))));
    }
}

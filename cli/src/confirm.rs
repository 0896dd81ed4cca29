//! Asks for confirmation on the terminal.

use std::io::{self, BufRead, IsTerminal, Write};

/// Whether there is a terminal to ask on.
pub(crate) fn is_possible() -> bool {
    io::stdin().is_terminal()
}

/// Shows the question, waits for a line, and returns whether it is `yes`.
pub(crate) fn confirmed(question: &str) -> io::Result<bool> {
    print!("{question}");
    io::stdout().flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

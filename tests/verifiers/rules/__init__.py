"""Rules that read answers: tables of texts, and what each rule makes of them."""

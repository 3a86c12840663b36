"""Operations on cached rows, each a plain torch reference that a faster one is compared with."""

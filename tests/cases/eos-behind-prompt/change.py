ADDS_EOS = True
